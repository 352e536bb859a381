"""Random calls: hypothesis draws them, and each must meet the tolerance and other rules of all calls."""
