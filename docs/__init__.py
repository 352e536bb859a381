"""The site: pages, and the code that draws its pictures, writes its tables and reads the docstrings. `make docs`."""
