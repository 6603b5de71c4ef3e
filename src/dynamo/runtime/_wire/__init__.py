"""The protocols, as bytes and values: nothing here does I/O or knows the time.

A map, from a socket inwards:

``framing``
    cuts length-prefixed frames out of a stream of bytes, and puts large ones together
    in memory that is used again.
``two_part``
    the message of a header and a body in which the call-home lane wraps requests and
    all that travels on the connections back.
``callhome``
    the call-home lane, that of genuine peers.  The client sends a request frame to the
    worker's port and reads one ack per request, in order; the worker dials the client's
    response port and sends a handshake, a prologue, items, a final mark and a sentinel.
``duplex_frames``, ``duplex``
    our own lane, docs/design/duplex.md: types and payloads of frames, and the state
    machine of each side, with credit.
``payload``
    the body of requests and items in MessagePack or JSON, and the annotated envelope.
``faults``
    exceptions of handlers as error objects, and back.
``records``
    what instances write into discovery: paths, keys, addresses, records.
``propagation``
    the headers of a request: ids, trace context, time left.
"""
