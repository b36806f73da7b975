"""How hosts' steps are run: eagerly, as captured graphs, compiled.

Every executor gives the same bits as the eager one. What a step is stands in `host`; decisions
about growth may not come in.
"""
