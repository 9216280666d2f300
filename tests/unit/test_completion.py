"""Shell completion: candidates for lines, and in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d2plm.cli import main
from d2plm.completion import candidates
from tests.conftest import Captured, MonkeyPatch

REPOSITORY = Path(__file__).parents[2]


LINES = {
    "d2plm tr": ["train "],
    "d2plm data ": ["--help ", "export ", "head ", "stats ", "verify "],
    "d2plm train trainer.max_st": ["trainer.max_steps="],
    "d2plm train mod": ["model.", "model=", "model_dir="],
    "d2plm train trainer.precision=fp1": ["trainer.precision=fp16 "],
    "d2plm doctor cluster=": ["cluster=auto ", "cluster=false ", "cluster=true "],
    "d2plm train --dry": ["--dry-run ", "--dry_run="],
    "d2plm score input=data/p": ["input=data/proteins.fasta "],
    "d2plm evaluate model_dir=da": ["model_dir=data/"],
    "d2plm score input=data/.": ["input=data/.hidden "],
}


def test_what_may_follow(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "proteins.fasta").touch()
    (tmp_path / "data" / ".hidden").touch()
    monkeypatch.chdir(tmp_path)
    assert {line: candidates(line) for line in LINES} == LINES


def test_completion_help_and_a_wrong_key_import_nothing_that_is_slow() -> None:
    program = (
        "import sys; from d2plm.cli import main\n"
        "assert main(['completion', 'candidates', 'd2plm train trainer.max_st']) == 0\n"
        "assert main(['--help']) == main(['--version']) == 0\n"
        "assert main(['train', 'trainer.max_stepz=1']) == 2\n"
        "slow = {'torch', 'hydra', 'omegaconf', 'numpy', 'rich', 'mlflow'} & set(sys.modules)\n"
        "assert not slow and len(sys.modules) < 300, (slow, len(sys.modules))"
    )
    words = [sys.executable, "-c", program]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.returncode == 0, ran.stderr
    assert "trainer.max_steps=\n" in ran.stdout and "transformers" in ran.stdout
    assert "did you mean 'trainer.max_steps'?" in ran.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_each_shell_has_a_script_and_bash_completes_after_what_it_takes_for_a_word(
    tmp_path: Path, capsys: Captured
) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "completion candidates" in capsys.readouterr().out
    program = tmp_path / "d2plm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m d2plm "$@"\n')
    program.chmod(0o755)
    script = (
        'source <("$0" completion bash); complete -p d2plm; COMP_WORDS=("$0");'
        'for COMP_LINE in "$@"; do COMP_POINT=${#COMP_LINE}; _d2plm;'
        'printf "[%s]" "${COMPREPLY[@]}"; echo; done'
    )
    lines = ["d2plm train model=nan", "d2plm data st", "d2plm tra"]
    words = [shutil.which("bash") or "", "--norc", "-c", script, str(program), *lines]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.returncode == 0, ran.stderr
    expected = ["complete -o nospace -F _d2plm d2plm", "[nano ]", "[stats ]", "[train ]"]
    assert ran.stdout.splitlines() == expected
