"""What hosts are trained on: tasks, the built-in ones, and where their data comes from.

How hosts are run may not come in: nothing here knows devices, executors or populations. Importing
`fetch` must not load torch, so this file imports nothing.
"""
