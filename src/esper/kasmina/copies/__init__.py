"""All that a copy of a layer inherits."""
