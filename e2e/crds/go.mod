// The kinds of other projects, as their own releases define them. Nothing is compiled: e2e/optional_crds.py takes the
// YAML files out of these modules, which the go command checks against go.sum.
module millstream.dev/e2e/crds

go 1.26
