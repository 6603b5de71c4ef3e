"""What runs inside the measured processes: workers, clients and the loads.

Also imported by the interpreter of the genuine wheel: only the standard library, msgspec,
uvloop and ``dynamo.runtime`` may be imported here; grpc and nats in their own files.
"""
