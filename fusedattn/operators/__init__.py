"""The operators of torch.library: schemas, derivatives and what runs them."""
