"""Shell completion: candidates for lines, and in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d2plm.cli import main
from d2plm.completion import candidates

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("d2plm tr", ["train "]),
        ("d2plm --ver", ["--version "]),
        ("d2plm --json dat", ["data "]),
        ("d2plm data ", ["--help ", "export ", "head ", "stats ", "verify "]),
        ("d2plm pipeline can", ["cancel "]),
        ("d2plm completion ", ["bash ", "fish ", "zsh "]),
        ("d2plm train trainer.max_st", ["trainer.max_steps="]),
        ("d2plm train --trainer.max_st", ["--trainer.max_steps="]),
        ("d2plm train mod", ["model.", "model=", "model_dir="]),
        ("d2plm train model=esm2_1", ["model=esm2_150m "]),
        ("d2plm train --model nan", ["nano "]),
        ("d2plm pipeline run experiment=de", ["experiment=debug ", "experiment=demo "]),
        ("d2plm train paradigm.sou", ["paradigm.source="]),
        ("d2plm train paradigm.schedule", ["paradigm.schedule="]),
        ("d2plm train paradigm=flow_matching paradigm.sched", ["paradigm.schedule="]),
        ("d2plm train trainer.precision=fp1", ["trainer.precision=fp16 "]),
        ("d2plm doctor cluster=", ["cluster=auto ", "cluster=false ", "cluster=true "]),
        ("d2plm prepare data.keep_prepared=t", ["data.keep_prepared=true "]),
        ("d2plm train --dry", ["--dry-run ", "--dry_run="]),
        ("d2plm train --config-name adap", ["adapt "]),
        ("d2plm trian mod", []),
        ("d2plm data stast ", []),
    ],
)
def test_what_may_follow(line: str, expected: list[str]) -> None:
    assert candidates(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("d2plm score input=da", ["input=data/"]),
        ("d2plm score input=data/p", ["input=data/proteins.fasta "]),
        ("d2plm score --input data/p", ["data/proteins.fasta "]),
        ("d2plm train --config-file data/p", ["data/proteins.fasta "]),
        ("d2plm evaluate model_dir=da", ["model_dir=data/"]),
        ("d2plm checkpoint list dat", ["data/"]),
        ("d2plm score 'input=data/p", ["input=data/proteins.fasta "]),
        ("d2plm score input=data/.", ["input=data/.hidden "]),
        ("d2plm score input=absent/", []),
    ],
)
def test_paths_follow_keys_that_take_them(
    line: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "proteins.fasta").touch()
    (tmp_path / "data" / ".hidden").touch()
    monkeypatch.chdir(tmp_path)
    assert candidates(line) == expected


@pytest.mark.parametrize(
    ("words", "code", "written"),
    [
        (["completion", "candidates", "d2plm train trainer.max_st"], 0, "trainer.max_steps=\n"),
        (["--help"], 0, "usage: d2plm"),
        (["--version"], 0, "transformers"),
        (["train", "trainer.max_stepz=1"], 2, "did you mean 'trainer.max_steps'?"),
    ],
)
def test_completion_help_and_a_wrong_key_import_nothing_that_is_slow(
    words: list[str], code: int, written: str
) -> None:
    program = (
        "import sys; from d2plm.cli import main; code = main(sys.argv[1:]);"
        "slow = {'torch', 'hydra', 'omegaconf', 'numpy', 'rich', 'mlflow'} & set(sys.modules);"
        "many = len(sys.modules) > 300;"
        "sys.exit(f'{slow}, {len(sys.modules)} modules' if slow or many else code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert ran.returncode == code, ran.stderr
    assert written in ran.stdout + ran.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_after_what_it_takes_for_a_word(tmp_path: Path) -> None:
    program = tmp_path / "d2plm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m d2plm "$@"\n')
    program.chmod(0o755)
    script = (
        'source <("$0" completion bash); complete -p d2plm; COMP_WORDS=("$0");'
        'for COMP_LINE in "$@"; do COMP_POINT=${#COMP_LINE}; _d2plm;'
        'printf "[%s]" "${COMPREPLY[@]}"; echo; done'
    )
    lines = ["d2plm train model=nan", "d2plm data st", "d2plm tra"]
    ran = subprocess.run(
        [shutil.which("bash") or "", "--norc", "-c", script, str(program), *lines],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "complete -o nospace -F _d2plm d2plm",
        "[nano ]",
        "[stats ]",
        "[train ]",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "completion candidates" in capsys.readouterr().out


def test_an_unknown_shell_is_rejected_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err
