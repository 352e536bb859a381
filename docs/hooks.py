"""Hooks of mkdocs that draw pictures, make tables and include files when the site is built."""

from mkdocs.structure.files import File

from docs import expand, pictures


def on_files(files, config):
    for name, draw in pictures.PICTURES.items():
        files.append(File.generated(config, f"images/{name}.svg", content=draw()))
    return files


def on_page_markdown(markdown, page, config, files):
    return expand.expanded(markdown)
