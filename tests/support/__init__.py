"""What several tests share: starting ranks, and the reference values that they are compared with."""
