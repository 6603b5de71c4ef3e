"""What ``make bench`` runs: ours, the genuine wheel, other peers and floors, in pairs.

``python -m benchmarks`` starts a worker and a client process per peer, gives the same
loads to all of them in alternating rounds, and reports medians of per-round ratios.
Absolute figures say nothing about another run.
"""
