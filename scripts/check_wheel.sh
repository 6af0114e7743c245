#!/usr/bin/env bash
# Builds the wheel and runs it from an empty directory, outside the checkout: scripts/check_wheel.sh PYTHON
# PYTHON has the dependencies (and may have the checkout installed editable: the wheel's folder comes first).
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$python" -m build --quiet --wheel --outdir "$dir/dist" "$root"
"$python" -m pip install --quiet --no-deps --target "$dir/site" "$dir"/dist/*.whl
mkdir "$dir/empty"
cd "$dir/empty"
export PYTHONPATH="$dir/site" KD_CACHE="$dir/cache"
"$python" -c "import kd, pathlib, sys; sys.exit(not pathlib.Path(kd.__file__).is_relative_to('$dir/site'))"
for module in recipes configs tests; do # the wheel owns no top-level name but kd
  if [ -e "$dir/site/$module" ]; then echo "the wheel installs $module at the top level"; exit 1; fi
done
"$dir/site/bin/kd-train" --list
"$dir/site/bin/kd-train" recipe=foodtag_vit config=debug --print_config > resolved.yaml
small="data.source.train_per_class=2 data.source.val_per_class=2"
"$dir/site/bin/kd-train" recipe=foodtag_vit config=debug $small runs_dir="$dir/runs"
"$dir/site/bin/kd-eval" "$dir/runs/foodtag_vit/latest"
"$dir/site/bin/kd-report" "$dir/runs/foodtag_vit/latest"
test -z "$(ls -A . | grep -v resolved.yaml)" # nothing else was written here
echo "wheel: ok"
