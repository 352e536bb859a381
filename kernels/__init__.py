"""What knows Triton: a kernel a file, made of the words in `vocabulary`."""
