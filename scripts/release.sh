#!/bin/bash
# Build a release into dist/: the wheel, the sdist, the .deb packages and SHA256SUMS, from a clean tree. REVISION as in scripts/package.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "release: $*" >&2; exit 1; }

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[ -z "$(git status --porcelain)" ] || die "the working tree has changes that are not committed; commit them first"
grep -q "^## \[$version\]" CHANGELOG.md || die "CHANGELOG.md has no section [$version]; add it, or correct the version in pyproject.toml"

rm -rf dist
make --no-print-directory wheel package
(cd dist && sha256sum -- healthd-* healthd_* >SHA256SUMS)
cat dist/SHA256SUMS
echo "release: healthd $version is in dist/; verify a copy with: sha256sum --check SHA256SUMS"
grep -q "^## \[$version\] - [0-9]" CHANGELOG.md || echo "release: before you publish, set the date of [$version] in CHANGELOG.md"
grep -q 'healthd\.example\.org' pyproject.toml && echo "release: before you publish, fill in maintainers and project.urls in pyproject.toml"
exit 0
