"""Which network to take: designs, frontiers and their verdicts, advice, learned shapes."""
