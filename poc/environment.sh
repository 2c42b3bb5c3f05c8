# Sourced: makes .venv beside the project with what requirements.txt and extras name, once for each state of those files,
# and sets $python. $MEDPFL_EXTRAS (say "test") adds optional dependencies of pyproject.toml.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "MedPFL needs Python 3.11, 3.12 or 3.13; none was found (set PYTHON to name one)" >&2
  return 1
}
venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/.medpfl-$(cat "$root/requirements.txt" "$root/constraints.txt" "$root/pyproject.toml" | cksum | tr ' ' '-')-${MEDPFL_EXTRAS:-}"
if [ ! -e "$stamp" ]; then
  base="$(find_python)"
  echo "Installing into $venv (once; a few minutes)" >&2
  [ -x "$python" ] || "$base" -m venv "$venv"
  # Python compiles what is imported when it first is; pip would compile all of it, one file after another.
  "$python" -m pip install --quiet --no-compile --disable-pip-version-check -r "$root/requirements.txt"
  "$python" -m pip install --quiet --no-compile --disable-pip-version-check -c "$root/constraints.txt" \
    -e "$root${MEDPFL_EXTRAS:+[$MEDPFL_EXTRAS]}"
  touch "$stamp"
fi
export PATH="$venv/bin:$PATH"
