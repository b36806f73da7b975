"""The growing network:

hosts, slots, seeds, blueprints, blending, gates, wrapping any module, export.
"""
