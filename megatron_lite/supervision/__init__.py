"""Floor 4: supervision of a run.

It finds ranks that die, hang, hold the others up or drift apart. It also ends
a run early on request.
"""
