#!/bin/bash
# Builds a real Kubernetes control plane to test against, from Debian's own source package.
#
# Nothing prebuilt can be installed by name, so API server, controller manager, scheduler and kubemark
# are compiled with Debian's Go (about ten minutes on two cores, once); etcd comes as a package. The
# binaries stay in ${HOLDFAST_ENGINES:-~/.cache/holdfast-engines}/kubernetes, outside the tree; a second
# call finds them and does nothing. The machine's own apt sources say where packages come from, and they
# are not changed. A build that failed goes on where it stopped when it is called again.
set -euo pipefail

engines=${HOLDFAST_ENGINES:-$HOME/.cache/holdfast-engines}
target=$engines/kubernetes
work=$engines/kubernetes-build
log=$engines/kubernetes-build.log
binaries=(kube-apiserver kube-controller-manager kube-scheduler kubemark)
packages=(golang-go make gcc libc6-dev rsync jq dpkg-dev patch openssl)

fail() {
    echo "kubernetes_build: $*" >&2
    exit 1
}

# Run one step, its output in the log; say which step failed and show the log's end.
step() {
    local title=$1
    shift
    echo "kubernetes_build: $title"
    printf '\n=== %s\n' "$title" >>"$log"
    "$@" >>"$log" 2>&1 && return
    tail -n 15 "$log" >&2
    fail "could not $title; the whole output is in $log; run this script again once it is mended"
}

apt_get() {
    env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -o APT::Sandbox::User=root "$@"
}

# The same as apt_get, with the machine's package sources turned into sources of source code.
apt_get_source() {
    apt_get -o Dir::Etc::sourcelist="$work/sources/none.list" -o Dir::Etc::sourceparts="$work/sources" \
        -o Dir::State::lists="$work/lists" "$@"
}

write_deb_src() {
    local file found=no
    rm -rf "$work/sources" && mkdir -p "$work/sources" "$work/lists/partial"
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -f "$file" ] || continue
        sed -n 's/^deb /deb-src /p' "$file" >"$work/sources/$(basename "$file" .list)-src.list"
        found=yes
    done
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -f "$file" ] || continue
        sed 's/^Types:.*/Types: deb-src/' "$file" >"$work/sources/$(basename "$file")"
        found=yes
    done
    [ $found = yes ] || { echo "there are no package sources under /etc/apt"; return 1; }
}

# Unpack a package into a folder; nothing is installed, so no etcd starts as a service.
unpack_package() {
    local name=$1 into=$2
    rm -rf "$work/packages/$name" && mkdir -p "$work/packages/$name" "$into"
    (cd "$work/packages/$name" && apt_get download "$name" && dpkg-deb -x ./*.deb "$into")
}

fetch_source() {
    local src=$work/go/src/k8s.io
    rm -rf "$work/go" && mkdir -p "$src"
    (cd "$src" && apt_get_source source kubernetes && mv kubernetes-*/ kubernetes)
}

# The vendored reflect2 1.0.1 makes the API server crash when built with Go 1.18 or newer.
replace_reflect2() {
    local vendored=$source/vendor/github.com/modern-go/reflect2
    unpack_package golang-github-modern-go-reflect2-dev "$work/reflect2"
    rm -rf "$vendored"
    cp -rL "$work/reflect2/usr/share/gocode/src/github.com/modern-go/reflect2" "$vendored"
}

go_build() {
    (cd "$source" && nice go build -tags providerless,dockerless -ldflags "$stamps-s -w" \
        -o "$work/bin/$1" "./cmd/$1")
}

fetch_etcd() {
    unpack_package etcd-server "$work/etcd"
    cp "$work/etcd/usr/bin/etcd" "$work/bin/etcd"
}

[ -f "$target/VERSION" ] && { echo "kubernetes_build: $(cat "$target/VERSION") is in $target"; exit 0; }
[ "$(id -u)" = 0 ] || fail "packages can only be installed by root; run it as root or with sudo -E"
command -v apt-get >/dev/null || fail "there is no apt-get; the build needs Debian 12 or a container of it"
mkdir -p "$work/bin" || fail "cannot write to $engines; set HOLDFAST_ENGINES to a folder that can be written"
exec 9>"$engines/kubernetes-build.lock"
flock -n 9 || { echo "kubernetes_build: waiting for another build"; flock 9; }
[ -f "$target/VERSION" ] && { echo "kubernetes_build: another build has made it"; exit 0; }
free_kib=$(df --output=avail "$engines" | tail -n 1)
[ "$free_kib" -gt 6000000 ] || fail "$engines has less than 6 GB left; free some or set HOLDFAST_ENGINES"

: >"$log"
source=$work/go/src/k8s.io/kubernetes
step "update the package lists (is there a network?)" apt_get update --error-on=any
step "install ${packages[*]}" apt_get install -y --no-install-recommends "${packages[@]}"
step "derive deb-src entries from the machine's own sources" write_deb_src
step "update the lists of source packages" apt_get_source update --error-on=any
apt_get_source source --print-uris kubernetes >/dev/null 2>>"$log" \
    || fail "the machine's package sources have no source package kubernetes; Debian 12 has one"
[ -f "$work/fetched" ] || { step "fetch the source of kubernetes" fetch_source && touch "$work/fetched"; }
step "replace the vendored reflect2" replace_reflect2
step "fetch etcd" fetch_etcd

version=$(dpkg-parsechangelog -l "$source/debian/changelog" -S Version)
export GOPATH=$work/go GOCACHE=$work/go-cache GO111MODULE=off CGO_ENABLED=0 GOFLAGS=-p=2
# Debian may write 1.20.5+really1.20.2-1.1: the last one counts.
release=${version##*really}
release=${release%%[-+~]*}
minor=${release#*.}
stamps=
for package in client-go/pkg/version component-base/version; do
    package=k8s.io/kubernetes/vendor/k8s.io/$package
    stamps+="-X $package.gitVersion=v$release -X $package.gitMajor=${release%%.*} "
    stamps+="-X $package.gitMinor=${minor%%.*} "
done
step "generate code (a minute or two)" nice make -C "$source" generated_files
for name in "${binaries[@]}"; do
    step "compile $name (one to four minutes)" go_build "$name"
done

rm -rf "$target.new" "$target" && mkdir "$target.new"
mv "$work/bin/"* "$target.new/"
echo "kubernetes $version" >"$target.new/VERSION"
mv "$target.new" "$target"
rm -rf "$work"
echo "kubernetes_build: $(cat "$target/VERSION") is in $target"
