{{/*
The settings files of the processes. Each is what the user gave below `<process>.settings`, with what the chart decides
laid over it. Everything is a plain mapping rendered by toYaml, so quoting is never a template's business.
*/}}

{{- define "kvist.telemetry" -}}
{{- merge (dict "admin_listen" (printf "%s:9090" .Values.listenHost)) .Values.telemetry | toYaml -}}
{{- end -}}

{{/* How the bus is reached, as YAML. Argument: the root. */}}
{{- define "kvist.bus" -}}
{{- $urls := .Values.nats.urls -}}
{{- if .Values.nats.bundled -}}
{{- $urls = list (printf "nats://%s-nats.%s.svc:4222" (include "kvist.fullname" .) .Release.Namespace) -}}
{{- end -}}
{{- $bus := dict "urls" $urls -}}
{{- if .Values.nats.caSecret -}}
{{- $_ := set $bus "tls_ca_file" "/etc/kvist-nats/ca.crt" -}}
{{- end -}}
{{- if .Values.nats.credentialsSecret -}}
{{- $_ := set $bus "credentials_file" "/etc/kvist-nats/bus.creds" -}}
{{- end -}}
{{- toYaml $bus -}}
{{- end -}}

{{/*
The door of a server: its certificate, and with roles the authorities of those who may call, or that it speaks plain text.
Argument: root, folder of the certificate.
*/}}
{{- define "kvist.doorOf" -}}
{{- if .root.Values.tls.enabled -}}
{{- $door := dict "tls_certificate_file" (printf "%s/tls.crt" .folder) "tls_key_file" (printf "%s/tls.key" .folder) -}}
{{- if include "kvist.hasRoles" .root -}}
{{- $_ := set $door "tls_client_ca_file" (printf "%s/ca.crt" .folder) -}}
{{- end -}}
{{- toYaml $door -}}
{{- else -}}
{{- dict "insecure" true | toYaml -}}
{{- end -}}
{{- end -}}

{{/* The door of a process. Argument: the root. */}}
{{- define "kvist.door" -}}
{{- include "kvist.doorOf" (dict "root" . "folder" "/etc/kvist-tls") -}}
{{- end -}}

{{/* The door of workers, whose role is not that of the agent in whose pod they live. Argument: the root. */}}
{{- define "kvist.workerDoor" -}}
{{- $folder := ternary "/etc/kvist-worker-tls" "/etc/kvist-tls" (not (empty (include "kvist.hasRoles" .))) -}}
{{- include "kvist.doorOf" (dict "root" . "folder" $folder) -}}
{{- end -}}

{{/* Where a gRPC server listens. Argument: root, port. */}}
{{- define "kvist.listen" -}}
{{- merge (dict "listen" (printf "%s:%d" .root.Values.listenHost .port)) (include "kvist.door" .root | fromYaml) | toYaml -}}
{{- end -}}

{{/* How a process calls others. Argument: the root. */}}
{{- define "kvist.caller" -}}
{{- if .Values.tls.enabled -}}
{{- dict "tls_ca_file" "/etc/kvist-tls/ca.crt" | toYaml -}}
{{- else -}}
{{- dict | toYaml -}}
{{- end -}}
{{- end -}}

{{/* The state store as controllers and KV masters take it. */}}
{{- define "kvist.store" -}}
{{- if eq .Values.store.kind "sqlite" -}}
{{- dict "kind" "sqlite" "path" "/var/lib/kvist/state.sqlite" | toYaml -}}
{{- else -}}
{{- $values := .Values.store.etcd -}}
{{- $etcd := dict "endpoints" $values.endpoints "namespace" $values.namespace -}}
{{- if $values.tls.existingSecret -}}
{{- $_ := set $etcd "tls_ca_file" "/etc/kvist-etcd-tls/ca.crt" -}}
{{- if $values.tls.clientCertificate -}}
{{- $_ := set $etcd "tls_certificate_file" "/etc/kvist-etcd-tls/tls.crt" -}}
{{- $_ := set $etcd "tls_key_file" "/etc/kvist-etcd-tls/tls.key" -}}
{{- end -}}
{{- else -}}
{{- $_ := set $etcd "insecure" true -}}
{{- end -}}
{{- if $values.username -}}
{{- $_ := set $etcd "username" $values.username -}}
{{- $_ := set $etcd "password_file" "/etc/kvist-etcd-password/password" -}}
{{- end -}}
{{- dict "kind" "etcd" "etcd" $etcd | toYaml -}}
{{- end -}}
{{- end -}}

{{- define "kvist.router.settings" -}}
{{- $own := dict
  "http_listen" (printf "%s:8000" .Values.listenHost)
  "grpc_listen" (printf "%s:7000" .Values.listenHost)
  "controllers" (list (include "kvist.controllerAddress" .))
  "last_state_file" "/var/lib/kvist/cluster-state.json"
  "bus" (include "kvist.bus" . | fromYaml)
  "telemetry" (include "kvist.telemetry" . | fromYaml)
-}}
{{- $own = merge $own (include "kvist.door" . | fromYaml) (include "kvist.caller" . | fromYaml) -}}
{{- if include "kvist.hasRoles" . -}}
{{- /* Clients of gRPC have no certificate of this mesh, as those of the HTTP edge have none: API keys say who they are. */}}
{{- $_ := set $own "tls_client_optional" true -}}
{{- end -}}
{{- if .Values.kvmaster.enabled -}}
{{- $_ := set $own "kvmasters" (list (include "kvist.kvmasterAddress" .)) -}}
{{- end -}}
{{- if .Values.router.apiKeys.existingSecret -}}
{{- $_ := set $own "api_keys_file" (printf "/etc/kvist-api-keys/%s" .Values.router.apiKeys.key) -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.router.settings) $own | toYaml -}}
{{- end -}}

{{- define "kvist.controller.settings" -}}
{{- $own := dict
  "cluster" .Values.clusterName
  "grpc" (include "kvist.listen" (dict "root" . "port" 7100) | fromYaml)
  "store" (include "kvist.store" . | fromYaml)
  "telemetry" (include "kvist.telemetry" . | fromYaml)
-}}
{{- $own = merge $own (include "kvist.caller" . | fromYaml) -}}
{{- if and .Values.tls.enabled (gt (int .Values.controller.replicas) 1) -}}
{{- $_ := set $own "advertised_domain" (include "kvist.peersDomain" .) -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.controller.settings) $own | toYaml -}}
{{- end -}}

{{- define "kvist.kvmaster.settings" -}}
{{- $own := dict
  "cluster" .Values.clusterName
  "grpc" (include "kvist.listen" (dict "root" . "port" 7200) | fromYaml)
  "controllers" (list (include "kvist.controllerAddress" .))
  "bus" (include "kvist.bus" . | fromYaml)
  "telemetry" (include "kvist.telemetry" . | fromYaml)
-}}
{{- if eq .Values.store.kind "etcd" -}}
{{- $_ := set $own "store" (include "kvist.store" . | fromYaml) -}}
{{- end -}}
{{- $own = merge $own (include "kvist.caller" . | fromYaml) -}}
{{- mergeOverwrite (deepCopy .Values.kvmaster.settings) $own | toYaml -}}
{{- end -}}

{{- define "kvist.agent.settings" -}}
{{- $own := dict
  "state_folder" "/var/lib/kvist/agent"
  "controllers" (list (include "kvist.controllerAddress" .))
  "grpc" (include "kvist.listen" (dict "root" . "port" 7300) | fromYaml)
  "bus" (include "kvist.bus" . | fromYaml)
  "workers" (merge (dict
    "command" (list "python" "/etc/kvist-worker/start_worker.py")
    "stop_on_exit" true
    "listen_host" (trimAll "[]" .Values.listenHost)
  ) (include "kvist.workerDoor" . | fromYaml))
  "telemetry" (include "kvist.telemetry" . | fromYaml)
-}}
{{- $own = merge $own (include "kvist.caller" . | fromYaml) -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $own "advertised_domain" (include "kvist.agentsDomain" .) -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.agent.settings) $own | toYaml -}}
{{- end -}}

{{/* What all workers share; start_worker.py lays what the agent says over it. */}}
{{- define "kvist.worker.settings" -}}
{{- mergeOverwrite (deepCopy .Values.worker.settings) (dict "telemetry" (deepCopy .Values.telemetry)) | toPrettyJson -}}
{{- end -}}

{{/* The model services as the controller takes them. */}}
{{- define "kvist.modelServices" -}}
{{- $resources := list -}}
{{- range .Values.modelServices -}}
{{- $metadata := dict "name" .name "labels" (default dict .labels) -}}
{{- $resources = append $resources (dict "apiVersion" "kvist.dev/v1alpha1" "kind" "ModelService" "metadata" $metadata "spec" .spec) -}}
{{- end -}}
{{- toPrettyJson $resources -}}
{{- end -}}

{{/* A duration such as 30s, 500ms or 2m in seconds, rounded up. */}}
{{- define "kvist.seconds" -}}
{{- $text := toString . -}}
{{- $number := float64 (regexFind "^[0-9.]+" $text) -}}
{{- $unit := regexFind "[a-z]*$" $text -}}
{{- $factor := index (dict "" 1.0 "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit -}}
{{- ceil (mulf $number $factor) | int -}}
{{- end -}}
