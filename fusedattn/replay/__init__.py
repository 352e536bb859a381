"""A call like an earlier one, launched again without being checked and prepared again."""
