"""d2plm completion: the script that has a shell ask `d2plm` what may follow."""

from d2plm.core.errors import ConfigError, did_you_mean
from d2plm.core.terminal import result

HELP = """usage: d2plm completion bash|zsh|fish

What a shell needs to complete commands, actions, options, keys, groups' choices and paths.

  bash  echo 'source <(d2plm completion bash)' >> ~/.bashrc
  zsh   echo 'source <(d2plm completion zsh)' >> ~/.zshrc     (after compinit)
  fish  d2plm completion fish > ~/.config/fish/completions/d2plm.fish"""


def main(words: list[str]) -> int:
    """Print the script of a shell; or, as the scripts ask, the candidates for a line."""
    from d2plm.completion import SCRIPTS, SHELLS, candidates

    if not words or words[0] in ("-h", "--help"):
        result(HELP)
    elif words[0] == "candidates" and len(words) == 2:
        print("".join(f"{candidate}\n" for candidate in candidates(words[1])), end="")
    elif words[0] in SCRIPTS and len(words) == 1:
        print(SCRIPTS[words[0]], end="")
    else:
        said = " ".join(words)
        raise ConfigError(
            f"d2plm completion {said!r}: give a shell, one of {', '.join(SHELLS)}"
            f"{did_you_mean(said, SHELLS)}"
        )
    return 0
