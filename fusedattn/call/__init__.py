"""What a caller wrote, checked, in one form, and results in the caller's shape. Knows torch alone."""
