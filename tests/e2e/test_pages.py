"""The pages, typed in as a reader would: files are saved, commands run one after the other, Python is executed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import PAGES, Block, blocks
from support.paths import ROOT

LIMIT_S = 600
TYPED = [page for page in PAGES if any(block.language in ("sh", "python") and block.is_run for block in blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.name)
def test_a_page_can_be_typed_in(page: Path, tmp_path: Path) -> None:
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    script = "\n".join(["set -e", *(_typed(block, number) for number, block in enumerate(blocks(page)) if block.is_run)])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    told = tmp_path / "told.txt"
    with told.open("w") as out:  # a session of its own: what the page starts in the background ends with it
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        status = shell.wait(LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert status == 0, told.read_text()[-3000:]


def _typed(block: Block, number: int) -> str:
    """What the reader does with a block, in shell."""
    if block.file is not None:
        return f"cat > {block.file} <<'END OF FILE'\n{block.text}END OF FILE"
    if block.language == "python":
        return f"cat > block{number}.py <<'END OF FILE'\n{block.text}END OF FILE\npython block{number}.py"
    return block.text if block.language == "sh" else ""
