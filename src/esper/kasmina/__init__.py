"""The growing network: hosts, slots, seeds, blueprints, copies, evidence, prices, saving, export.

Everything that changes a module or its optimiser's groups is here. No training loop, no data set
and no policy comes in: those call this package. Which moves are legal is decided in `leyline`.
"""
