// Renders a Helm chart as `helm template` does, and decodes each object by the types of the Kubernetes API.
//
// A value that the chart's schema refuses, a field that Kubernetes does not know, or a field of another type
// ends the program with a sentence. Else it prints the objects as a JSON list.
//
//	chart FOLDER [VALUES…]
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"sort"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
)

func main() {
	log.SetFlags(0)
	objects, err := render(os.Args[1], os.Args[2:])
	if err != nil {
		log.Fatal(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(objects); err != nil {
		log.Fatal(err)
	}
}

func render(folder string, files []string) ([]runtime.Object, error) {
	found, err := loader.Load(folder)
	if err != nil {
		return nil, err
	}
	values := map[string]any{}
	for _, file := range files {
		read, err := chartutil.ReadValuesFile(file)
		if err != nil {
			return nil, err
		}
		values = chartutil.CoalesceTables(read, values)
	}
	release := chartutil.ReleaseOptions{Name: "demo", Namespace: "logs", IsInstall: true, Revision: 1}
	all, err := chartutil.ToRenderValues(found, values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	strict := engine.Engine{Strict: true}
	rendered, err := strict.Render(found, all)
	if err != nil {
		return nil, err
	}
	return decode(rendered)
}

func decode(rendered map[string]string) ([]runtime.Object, error) {
	codecs := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict)
	names := []string{}
	for name := range rendered {
		if strings.HasSuffix(name, ".yaml") {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	objects := []runtime.Object{}
	for _, name := range names {
		for _, text := range releaseutil.SplitManifests(rendered[name]) {
			object, _, err := codecs.UniversalDeserializer().Decode([]byte(text), nil, nil)
			if err != nil {
				return nil, fmt.Errorf("%s: %w\n%s", name, err, text)
			}
			objects = append(objects, object)
		}
	}
	return objects, nil
}
