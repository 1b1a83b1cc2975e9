#!/bin/bash
# Install the contents of a healthd package into DESTDIR: a virtual environment at /opt/healthd and the other files of a
# node. packaging/debian/rules calls it from the source tree.
#   packaging/tree.sh wheels PYTHON                    build the wheels of healthd and its dependencies; needs a network
#   packaging/tree.sh install PYTHON DESTDIR ZSH       install them; needs no network. ZSH: directory of zsh completions.
#     PACKAGE_VERSION=0.1.0-1~deb12 is what `healthd --version` prints beside the version of the program
set -euo pipefail
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONHASHSEED=0
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
work=build-package
python=$2
healthd='healthd[web,completion]' # TLS for the metrics page, TAB completion

wheels() {
  export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
  "$python" -m venv $work/tools
  # systemd-python is a source package with only a setup.py
  $work/tools/bin/python -m pip wheel --quiet --use-pep517 --wheel-dir $work/wheels ".${healthd#healthd}"
}

completion() { # SHELL FILE
  mkdir -p "$(dirname "$2")"
  "$venv/bin/python" "$venv/bin/healthd" completion "$1" >"$2"
}

install_into() { # DESTDIR ZSH
  local destdir=$1 venv=$1/opt/healthd share=$1/usr/share page part
  # Without pip: use the pip of the environment that built the wheels.
  "$python" -m venv --without-pip "$venv"
  "$venv/bin/python" "$(echo $work/tools/lib/python3*/site-packages/pip)" install --quiet --no-compile --no-index \
    --find-links $work/wheels "$healthd"
  rm -rf "$venv"/bin/activate* "$venv"/bin/Activate.ps1 "$venv/include"
  completion bash "$share/bash-completion/completions/healthd"
  completion zsh "$destdir$2/_healthd"
  completion fish "$share/fish/vendor_completions.d/healthd.fish"

  mv "$venv/share/healthd" "$share/"
  mv "$venv/share/man" "$share/"
  rm -f "$share/healthd"/healthd*.service "$share/healthd"/healthd*.path
  for part in ansible grafana prometheus; do
    if [ -d packaging/$part ] && [ ! -e "$share/healthd/$part" ]; then cp -r packaging/$part "$share/healthd/"; fi
  done
  for part in packaging/systemd/healthd-*-checks.conf; do
    if [ -e "$part" ]; then install -m 644 -t "$share/healthd" "$part"; fi # optional drop-in
  done
  if [ -n "${PACKAGE_VERSION:-}" ]; then echo "$PACKAGE_VERSION" >"$share/healthd/package-version"; fi
  ln -s /usr/share/healthd "$venv/share/healthd" # the path in README.md and docs/
  mkdir -p "$destdir/usr/bin"
  ln -s /opt/healthd/bin/healthd "$destdir/usr/bin/healthd"
  install -D -m 644 packaging/debian/healthd.toml "$destdir/etc/healthd/healthd.toml"
  for part in packaging/systemd/*.preset; do
    if [ -e "$part" ]; then install -D -m 644 -t "$destdir/usr/lib/systemd/system-preset" "$part"; fi
  done

  # Remove the build path. A path too long for a shebang line produces another kind of script.
  grep -rIlZ --exclude-dir=__pycache__ "$destdir" "$venv" | xargs -0r sed -i "s|$destdir||g"
  head -n 1 "$venv/bin/healthd" | grep -q '^#!/opt/healthd/bin/python' || { echo "the path $destdir is too long" >&2; exit 1; }
  # Compile here, not on the nodes. Check hashes instead of times, because an image may change the times.
  find "$venv" -name __pycache__ -prune -exec rm -rf {} +
  "$python" -m compileall -q --invalidation-mode checked-hash -s "$destdir" -p / "$venv/lib"
  find "$destdir" -type d -empty -delete
  if grep -rl "$destdir" "$destdir"; then echo "these files contain the build path" >&2; exit 1; fi
}

case $1 in
  wheels) wheels ;;
  install) install_into "$3" "$4" ;;
esac
