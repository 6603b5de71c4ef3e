"""Fuzzing of everything in ``dynamo.runtime._wire`` that reads what a peer wrote.

`targets` says what is called and what must hold, `seeds` where good input comes from,
`engines` how input is made; ``python -m fuzz`` runs them.
"""
