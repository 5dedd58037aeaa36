"""What `make docs` adds to docs/: pages of files that stand at the root, the examples, and links that lead to them.

In the sources links are those of a repository, so that pages read well there too; here they become those of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    license = f"# License\n\n```text\n{(ROOT / 'LICENSE').read_text()}```\n"
    files.append(File.generated(config, "LICENSE.md", content=license))
    files.append(File.generated(config, "examples.md", content=_examples()))
    return files


def _examples() -> str:
    """One page of all examples, with their sources as they are."""
    parts = ["# Examples\n\nWhole scripts, which the tests run. They are in `examples/` of the sources.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f'## {path.name}\n\n```python\n'
                     f"{path.read_text()}```\n")  # fmt: skip
    return "\n".join(parts)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    return f'<div class="keys">{html}</div>' if page.file.src_uri in ("config.md", "commands.md") else html


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    at_root = page.file.src_uri in PAGES

    def follow(link: re.Match[str]) -> str:
        image, text, target, anchor = link.group(1), link.group(2), link.group(3), link.group(4) or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return link.group(0)
        place = normpath(target if at_root else f"docs/{target}")
        if place.startswith("docs/"):
            return f"{image}[{text}]({place.removeprefix('docs/')}{anchor})"
        if place in PAGES:
            return f"[{text}]({place}{anchor})"
        if place == "LICENSE":
            return f"[{text}](LICENSE.md)"
        if place == "examples" or place.startswith("examples/"):
            name = place.removeprefix("examples").lstrip("/").replace(".py", "py")
            return f"[{text}](examples.md{'#' + name if name else ''})"
        if not (ROOT / place).exists():
            return link.group(0)  # which the build then tells of
        repository = config.repo_url
        return f"[{text}]({repository}/blob/main/{place})" if repository else text

    # Color console output that has no prompt as well.
    return LINK.sub(follow, markdown).replace("```console", "```bash")
