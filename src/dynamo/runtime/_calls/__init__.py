"""One call, both ends: contexts, streams, the outgoing and the incoming half.

Uses a lane only through the interfaces of `_transports`; knows no socket and no bytes.
"""
