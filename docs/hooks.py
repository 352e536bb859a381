"""Hooks of mkdocs, which draw the pictures and make the tables while the site is built."""

from mkdocs.structure.files import File

from docs import pictures, tables


def on_files(files, config):
    for name, draw in pictures.PICTURES.items():
        files.append(File.generated(config, f"images/{name}.svg", content=draw()))
    return files


def on_page_markdown(markdown, page, config, files):
    return tables.expanded(markdown)
