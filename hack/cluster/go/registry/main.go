// The image registry beside the cluster: distribution/registry with the file system as its only store.
//
// Upstream's own main links the SDKs of three clouds; leaving them out nearly halves what is compiled.
package main

import (
	"os"

	"github.com/distribution/distribution/v3/registry"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

func main() {
	if err := registry.RootCmd.Execute(); err != nil {
		os.Exit(1)
	}
}
