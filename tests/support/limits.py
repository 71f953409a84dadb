"""The time limits of tests.

No test measures the speed of a machine. A limit only ends a test that hangs.
"""

# Half of --distributed-timeout-minutes' default. A run that ends within it was not ended by that
# timeout.
HANG_S = 300.0


def patiently(check, limit):
    """Calls check(limit). If it fails and the limit is below a minute, tries four times the limit.

    It is for a test in which a time limit of the product expires while other ranks must have
    reached some point. On a busy machine they may need longer than the limit that the test prefers.
    """
    while True:
        try:
            return check(limit)
        except (AssertionError, RuntimeError):
            if limit >= 60.0:
                raise
        limit *= 4
