"""How hosts' steps are run: eagerly, as captured graphs, compiled."""
