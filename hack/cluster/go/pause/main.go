// The pause container: holds a pod's namespaces open and reaps the orphans of a shared PID namespace.
//
// Kubernetes' own is C (build/pause in its module); this is the same loop without a C compiler.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for { // one SIGCHLD may stand for several children
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}
