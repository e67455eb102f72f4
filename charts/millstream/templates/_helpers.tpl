{{/* The name of everything that this release makes: the release's own, with the chart's where it does not say it. */}}
{{- define "millstream.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" | trimSuffix "." }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" | trimSuffix "." }}
{{- end -}}
{{- end -}}

{{/* A Service's name is a DNS label that begins with a letter; a release's name may have dots, and begin with a digit. */}}
{{- define "millstream.metricsService" -}}
{{- $name := printf "%s-metrics" (include "millstream.name" . | replace "." "-") -}}
{{ regexMatch "^[0-9]" $name | ternary (printf "m-%s" $name) $name }}
{{- end -}}

{{/* What a selector may use: it can never change. */}}
{{- define "millstream.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "millstream.labels" -}}
{{ include "millstream.selectorLabels" . }}
app.kubernetes.io/version: {{ include "millstream.labelValue" .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ include "millstream.labelValue" (printf "%s-%s" .Chart.Name .Chart.Version) | quote }}
{{- end -}}

{{/* Labels or annotations of a value next to the chart's own: ours as a dict, the value, and its name for the message. */}}
{{- define "millstream.withOurs" -}}
{{- range $key, $_ := .given -}}
{{- if hasKey $.ours $key -}}
{{- fail (printf "%s: %s is set by the chart, and selectors or rollouts depend on it; leave it out" $.value $key) -}}
{{- end -}}
{{- end -}}
{{- toYaml (merge (dict) .ours (.given | default dict)) -}}
{{- end -}}

{{/* A version as a label value, which has neither the + of a build's metadata nor more than 63 characters. */}}
{{- define "millstream.labelValue" -}}
{{ . | replace "+" "_" | trunc 63 | trimAll "-_." }}
{{- end -}}

{{/* The restricted Pod Security profile, and a root file system that nobody writes to. */}}
{{- define "millstream.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "millstream.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "millstream.operatorImage" -}}
{{ required "operator.image is required: the reference that `make images` prints (kept in .tools/images.json)" .Values.operator.image }}
{{- end -}}

{{/* Enabled or Disabled: does the operator look at the cluster's nodes and at what pods hold of their GPUs? */}}
{{- define "millstream.inventory" -}}
{{- $mode := (.Values.inventory).mode | default "Auto" -}}
{{- if eq $mode "Auto" -}}
{{- if .Values.operator.watchNamespaces }}Disabled{{ else }}Enabled{{ end -}}
{{- else -}}
{{- $mode -}}
{{- end -}}
{{- end }}

{{/* Defaults of the models' pods. An operator of an earlier release does not know the newer fields: absent where empty. */}}
{{- define "millstream.podDefaults" -}}
{{- $pods := .Values.podDefaults | default dict -}}
{{- range $name := list "imagePullSecrets" "allowedHubs" -}}
{{- if not (get $pods $name) -}}
{{- $pods = omit $pods $name -}}
{{- end -}}
{{- end -}}
{{ $pods | toJson }}
{{- end -}}

{{/* The operator's defaults of the models' NetworkPolicies; values of an older chart lack the section. */}}
{{- define "millstream.network" -}}
{{- $network := .Values.network | default dict -}}
{{- dict "mode" ($network.mode | default "Managed") "ingress" ($network.ingress | default list) "dns" ($network.dns | default list) "dnsPorts" ($network.dnsPorts | default list) | toJson -}}
{{- end }}

{{/* Enabled or Disabled: may the operator read where the API server is? */}}
{{- define "millstream.apiServerEndpoints" -}}
{{ (.Values.network).apiServerEndpoints | default "Enabled" }}
{{- end -}}


{{/*
Enabled or Disabled: is what the operator's user writes judged by policies of the API server? A helm without a cluster
(`template`) knows no kinds, not even Pod: it is answered by the Kubernetes that the chart needs, which has the policies.
*/}}
{{- define "millstream.admissionPolicy" -}}
{{- $wanted := dig "enabled" false (.Values.admissionPolicy | default dict) -}}
{{- $kinds := .Capabilities.APIVersions -}}
{{- $served := or ($kinds.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy") (not ($kinds.Has "v1/Pod")) -}}
{{ and $wanted $served | ternary "Enabled" "Disabled" }}
{{- end -}}

{{/* The name of a policy. By its end the operator knows the chart's policies, and explains what they refuse. */}}
{{- define "millstream.policyName" -}}
{{ include "millstream.name" .root }}-{{ .policy }}.policy.millstream.dev
{{- end -}}

{{/* CEL: the user of this request is the operator. */}}
{{- define "millstream.isOperator" -}}
request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:{{ include "millstream.name" . }}'
{{- end -}}

{{/* CEL: an object is controlled by an LLMDeployment. The argument is the object's name in the expression. */}}
{{- define "millstream.isControlled" -}}
has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(owner, owner.kind == 'LLMDeployment' && owner.apiVersion.startsWith('millstream.dev/') && has(owner.controller) && owner.controller)
{{- end -}}

{{/* CEL: a list of strings that need no escape, such as names of namespaces. */}}
{{- define "millstream.celList" -}}
{{- if . }}['{{ join "', '" . }}']{{ else }}[]{{ end -}}
{{- end -}}

{{/* CEL: this request is about the object of a name in the release's own namespace. */}}
{{- define "millstream.isOwn" -}}
has(request.namespace) && request.namespace == '{{ .root.Release.Namespace }}' && has(request.name) && request.name == '{{ .name }}'
{{- end -}}
{{/* Allowed or Refused: network.mode Disabled in a spec. Where it is the default of all, a spec that says so changes nothing. */}}
{{- define "millstream.networkModeDisabled" -}}
{{- if eq ((.Values.network).mode | default "Managed") "Disabled" -}}
Allowed
{{- else -}}
{{ (.Values.authors).networkModeDisabled | default "Refused" }}
{{- end -}}
{{- end }}

{{/* The operator's PriorityClass: its name, which is given, or that of the one that the chart makes. */}}
{{- define "millstream.priorityClassName" -}}
{{- $own := (.Values.operator).priorityClass | default dict -}}
{{- if .Values.operator.priorityClassName -}}
{{ .Values.operator.priorityClassName }}
{{- else if eq ($own.mode | default "Managed") "Managed" -}}
{{ $own.name | default (printf "%s-operator" (include "millstream.name" .)) }}
{{- end -}}
{{- end }}
