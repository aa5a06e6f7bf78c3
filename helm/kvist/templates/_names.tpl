{{/* The chart's name, as the label app.kubernetes.io/name. */}}
{{- define "kvist.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/*
Prefix of all objects. At most 46 characters, so that the longest suffix still gives a valid Service name; a longer one is
cut and told apart by a digest. Release names may hold dots, names of Services may not.
*/}}
{{- define "kvist.fullname" -}}
{{- $name := include "kvist.name" . -}}
{{- $full := printf "%s-%s" .Release.Name $name -}}
{{- if .Values.fullnameOverride -}}
{{- $full = .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- $full = .Release.Name -}}
{{- end -}}
{{- $plain := $full | replace "." "-" -}}
{{- if gt (len $plain) 46 -}}
{{- printf "%s-%s" ($plain | trunc 37 | trimSuffix "-") ($full | sha256sum | trunc 8) -}}
{{- else -}}
{{- $plain -}}
{{- end -}}
{{- end -}}

{{- define "kvist.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "kvist.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* Labels that never change: selectors are immutable. Argument: root, component. */}}
{{- define "kvist.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvist.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of every object. Argument: root, component. */}}
{{- define "kvist.labels" -}}
{{ include "kvist.selectorLabels" . }}
app.kubernetes.io/part-of: kvist
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* Name and labels of an object. Argument: root, component, and suffix when it is not the component. */}}
{{- define "kvist.metadata" -}}
name: {{ include "kvist.fullname" .root }}-{{ .suffix | default .component }}
labels:
  {{- include "kvist.labels" . | nindent 2 }}
{{- end -}}

{{/* Image reference. Argument: image, default tag. */}}
{{- define "kvist.imageReference" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .tag) -}}
{{- end -}}
{{- end -}}

{{- define "kvist.image" -}}
{{- include "kvist.imageReference" (dict "image" .Values.image "tag" .Chart.AppVersion) -}}
{{- end -}}

{{/* `host:port` of the controller, under the name that its certificate bears. */}}
{{- define "kvist.controllerAddress" -}}
{{- printf "%s-controller.%s.svc:7100" (include "kvist.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/*
Domains below which DNS knows single pods by their addresses, such as `10-0-0-7.<domain>`: a certificate names all of them
as `*.<domain>`.
*/}}
{{- define "kvist.peersDomain" -}}
{{- printf "%s-controller-peers.%s.svc" (include "kvist.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "kvist.agentsDomain" -}}
{{- printf "%s-agents.%s.svc" (include "kvist.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* `host:port` of the KV master. */}}
{{- define "kvist.kvmasterAddress" -}}
{{- printf "%s-kvmaster.%s.svc:7200" (include "kvist.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* Whether each role has a certificate of its own; empty when not. Argument: the root. */}}
{{- define "kvist.hasRoles" -}}
{{- if and .Values.tls.enabled (compact (values .Values.tls.roleSecrets)) -}}
true
{{- end -}}
{{- end -}}

{{/* The Secret with the certificate of a component; what is no process of the mesh is an operator. Argument: root, component. */}}
{{- define "kvist.tlsSecret" -}}
{{- if include "kvist.hasRoles" .root -}}
{{- get .root.Values.tls.roleSecrets .component | default .root.Values.tls.roleSecrets.operator -}}
{{- else -}}
{{- .root.Values.tls.existingSecret -}}
{{- end -}}
{{- end -}}
