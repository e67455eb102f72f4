#!/bin/sh
# Writes to stdout a tar of what kube-proxy runs: iptables (nft variant), its extensions, and every library of either.
# The extensions' libraries matter: without libm (libxt_statistic) a Service with one endpoint works and one with
# several fails silently.
set -eu
tools="/usr/sbin/xtables-nft-multi"
extensions=$(find /usr/lib -path '*/xtables/*.so')
libraries=$(for file in $tools $extensions; do ldd "$file"; done | grep -o '/[^ ]*' | sort -u)
# shellcheck disable=SC2086 # the lists are meant to split; no path here has spaces
exec tar --create --dereference --absolute-names --file=- $tools $extensions $libraries
