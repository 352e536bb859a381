"""The documentation's site: pages, and the code for their pictures and tables. `make docs` builds it."""
