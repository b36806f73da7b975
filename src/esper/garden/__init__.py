"""Growing inside your own training loop: wrap a model, step once per epoch, take a network home.

A garden measures with your `evaluate` and decides between two epochs. It never trains, so no
training loop, task or executor comes in here; neither does anything of one framework.
"""
