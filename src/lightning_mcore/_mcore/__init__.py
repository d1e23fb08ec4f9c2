"""The boundary to Megatron-Core: the only package that imports ``megatron``.

``engine`` wraps the calls that build and run a model, ``checkpointing`` the sharded checkpoint
calls, ``cpu`` adapts the engine to a machine without a GPU. Differences between engine versions
are handled here and nowhere else.
"""
