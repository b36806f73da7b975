"""Runs policies and compares them with controls on the same hosts, data orders and rate plans.

One arm is a policy's whole episode on a set of host seeds. Nothing here learns (that is `simic`),
draws or prints (`dashboard`, `cli`), or decides what a policy's name means (`tamiyo`).
"""
