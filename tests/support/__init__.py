"""Parts that several tests share, such as starting ranks and computing reference values."""
