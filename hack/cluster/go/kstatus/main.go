// What kstatus makes of objects: a JSON list of them on stdin, a JSON list of {status, message} on stdout.
//
// Flux, Helm 4 and kpt decide by this very library whether something is deployed, so the e2e tests ask it and not a
// description of it.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

type answer struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "kstatus:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	var raw []json.RawMessage
	if err := json.NewDecoder(in).Decode(&raw); err != nil {
		return err
	}
	answers := make([]answer, 0, len(raw))
	for _, one := range raw {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(one); err != nil { // integers stay integers: generations are compared
			return err
		}
		result, err := status.Compute(object)
		if err != nil {
			return err
		}
		answers = append(answers, answer{Status: string(result.Status), Message: result.Message})
	}
	return json.NewEncoder(out).Encode(answers)
}
