{{/* Annotations and labels of a pod. Argument: root, component, pod, settings (whatever the pod must restart for). */}}
{{- define "kvist.podMetadata" -}}
annotations:
  checksum/config: {{ .settings | sha256sum }}
  {{- with .pod.annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
labels:
  {{- /* Without the chart's version: a new chart whose pods are the same restarts nothing. */}}
  {{- include "kvist.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/part-of: kvist
  {{- with .pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* What the specifications of all pods have in common. Argument: root, pod. */}}
{{- define "kvist.podSpec" -}}
serviceAccountName: {{ include "kvist.serviceAccountName" .root }}
automountServiceAccountToken: false
{{- /* A Service named `kvist--…` would otherwise put KVIST__ variables into the pod, which a process takes for settings. */}}
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Image and security of a container of ours. Argument: root. */}}
{{- define "kvist.container" -}}
image: {{ include "kvist.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
{{- end -}}

{{/* Liveness never depends on another process; readiness does. */}}
{{- define "kvist.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{/* Whether a component speaks NATS with files of its own; empty when not. Argument: root, component. */}}
{{- define "kvist.hasNatsFiles" -}}
{{- if and (has .component (list "router" "kvmaster" "agent")) (or .root.Values.nats.caSecret .root.Values.nats.credentialsSecret) -}}
true
{{- end -}}
{{- end -}}

{{/* Volumes that every process has. Argument: root, component, tls. */}}
{{- define "kvist.volumes" -}}
- name: settings
  configMap:
    name: {{ include "kvist.fullname" .root }}-{{ .component }}
- name: tmp
  emptyDir: {}
{{- if and .tls .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "kvist.tlsSecret" . }}
{{- end }}
{{- if include "kvist.hasNatsFiles" . }}
- name: nats
  projected:
    sources:
      {{- with .root.Values.nats.caSecret }}
      - secret:
          name: {{ . }}
          items: [{key: ca.crt, path: ca.crt}]
      {{- end }}
      {{- with .root.Values.nats.credentialsSecret }}
      - secret:
          name: {{ . }}
          items: [{key: {{ $.component }}.creds, path: bus.creds}]
      {{- end }}
{{- end }}
{{- end -}}

{{/* Where they are mounted. Argument: root, component, tls. */}}
{{- define "kvist.volumeMounts" -}}
- {name: settings, mountPath: /etc/kvist, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if and .tls .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/kvist-tls, readOnly: true}
{{- end }}
{{- if include "kvist.hasNatsFiles" . }}
- {name: nats, mountPath: /etc/kvist-nats, readOnly: true}
{{- end }}
{{- end -}}

{{/* What it takes to reach etcd. Argument: the root. */}}
{{- define "kvist.storeVolumes" -}}
{{- if eq .Values.store.kind "etcd" }}
{{- with .Values.store.etcd.tls.existingSecret }}
- name: etcd-tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.store.etcd.passwordSecret }}
- name: etcd-password
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where it is mounted. Argument: the root. */}}
{{- define "kvist.storeVolumeMounts" -}}
{{- if eq .Values.store.kind "etcd" }}
{{- if .Values.store.etcd.tls.existingSecret }}
- {name: etcd-tls, mountPath: /etc/kvist-etcd-tls, readOnly: true}
{{- end }}
{{- if .Values.store.etcd.passwordSecret }}
- {name: etcd-password, mountPath: /etc/kvist-etcd-password, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvist.podName" -}}
- name: KVIST__NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
{{- end -}}
