{{- define "quorumlog.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end -}}

{{- /* The labels that select the pods of a role. The argument of all following templates is (dict "root" $ "role" …). */ -}}
{{- define "quorumlog.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "quorumlog.labels" -}}
{{ include "quorumlog.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "quorumlog.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* The DNS name of a pod, which the role's headless Service publishes. POD_NAME is an environment variable. */ -}}
{{- define "quorumlog.host" -}}
$(POD_NAME).{{ include "quorumlog.name" .root }}-{{ .role }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{- define "quorumlog.metadataUrls" -}}
{{- $name := printf "%s-metadata" (include "quorumlog.name" .) -}}
{{- $urls := list -}}
{{- range $number := until (int .Values.metadata.replicas) -}}
{{- $urls = append $urls (printf "https://%s-%d.%s.%s.svc:8082" $name $number $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end -}}

{{- /* The settings with the paths of a pod's certificate. */ -}}
{{- define "quorumlog.certificateSettings" -}}
{{- if eq .root.Values.certificates.mode "csi" -}}
- {name: TLS_CERT_FILE, value: /certificates/tls.crt}
- {name: TLS_KEY_FILE, value: /certificates/tls.key}
- {name: TLS_CA_FILE, value: /certificates/ca.crt}
{{- else -}}
{{- $name := ternary "operator" "$(POD_NAME)" (eq .role "operator") -}}
- {name: TLS_CERT_FILE, value: {{ printf "/certificates/%s-%s.pem" .role $name | quote }}}
- {name: TLS_KEY_FILE, value: {{ printf "/certificates/%s-%s-key.pem" .role $name | quote }}}
- {name: TLS_CA_FILE, value: /certificates/ca.pem}
{{- end -}}
{{- end -}}

{{- define "quorumlog.certificateVolume" -}}
- name: certificates
{{- if eq .root.Values.certificates.mode "csi" }}
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ .root.Values.certificates.issuer.name }}
      csi.cert-manager.io/issuer-kind: {{ .root.Values.certificates.issuer.kind }}
      csi.cert-manager.io/duration: {{ .root.Values.certificates.duration }}
      csi.cert-manager.io/fs-group: "10001"
      csi.cert-manager.io/uri-sans: {{ printf "quorumlog://%s/%s/${POD_NAME}" .root.Values.cluster .role | quote }}
      {{- if eq .role "operator" }}
      csi.cert-manager.io/key-usages: digital signature,client auth
      {{- else }}
      csi.cert-manager.io/key-usages: digital signature,server auth,client auth
      csi.cert-manager.io/dns-names: {{ include "quorumlog.host" . | replace "$(POD_NAME)" "${POD_NAME}" | quote }}
      {{- end }}
{{- else }}
  secret:
    secretName: {{ index .root.Values.certificates.secrets .role }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "quorumlog.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# Do not change the group of all files on a large disk at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "quorumlog.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* A probe of an internal listener. It uses the pod's own certificate, because the listener rejects callers without one. Takes "path". */ -}}
{{- define "quorumlog.probe" -}}
exec:
  command:
    - python
    - -c
    - |
      import os, ssl, urllib.request
      context = ssl.create_default_context(cafile=os.environ["TLS_CA_FILE"])
      # Do not check the host name: the probe connects to 127.0.0.1, because the pod's DNS name may not resolve yet.
      context.check_hostname = False
      context.load_cert_chain(os.environ["TLS_CERT_FILE"], os.environ["TLS_KEY_FILE"])
      urllib.request.urlopen("https://127.0.0.1:" + os.environ["PORT"] + {{ .path | quote }}, context=context, timeout=4)
timeoutSeconds: 5
{{- end -}}

{{- define "quorumlog.publicProbe" -}}
httpGet: {path: {{ .path }}, port: public, scheme: HTTPS}
timeoutSeconds: 5
{{- end -}}

{{- /*
The objects of a role: its StatefulSet, the headless Service that publishes its pods' names, and its disruption budget. All
roles are StatefulSets, even the stateless ones: services connect to the host name in a process's certificate, and only pods
of a StatefulSet have stable host names.
Takes "port", "env" (text), and for bookies "isBookie", for gateways "isGateway".
*/ -}}
{{- define "quorumlog.workload" -}}
{{- $name := printf "%s-%s" (include "quorumlog.name" .root) .role -}}
{{- $values := index .root.Values .role -}}
{{- $probe := ternary "quorumlog.publicProbe" "quorumlog.probe" (eq .role "gateway") -}}
{{- $zoneOfNode := and (eq .role "bookie") (eq .root.Values.bookie.zone.from "node") -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{- include "quorumlog.labels" . | nindent 4 }}
spec:
  clusterIP: None
  # Publish addresses of pods that are not ready, because other services request a starting bookie's identity.
  publishNotReadyAddresses: true
  selector: {{- include "quorumlog.selector" . | nindent 4 }}
  ports:
    - {name: internal, port: {{ .port }}, targetPort: internal}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- include "quorumlog.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "quorumlog.selector" . | nindent 6 }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels: {{- include "quorumlog.labels" . | nindent 4 }}
spec:
  serviceName: {{ $name }}
  replicas: {{ $values.replicas }}
  # Start all pods at once, because each service waits for the services that it needs.
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{- include "quorumlog.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "quorumlog.labels" . | nindent 8 }}
    spec:
      {{- with .root.Values.image.pullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $zoneOfNode }}
      serviceAccountName: {{ $name }}
      {{- end }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      # Longer than DRAIN_S (20 s), so that a stopping service can finish the requests in flight.
      terminationGracePeriodSeconds: 45
      securityContext: {{- include "quorumlog.podSecurity" . | nindent 8 }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: topology.kubernetes.io/zone
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include "quorumlog.selector" . | nindent 14 }}
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include "quorumlog.selector" . | nindent 14 }}
      {{- with $values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $zoneOfNode }}
      initContainers:
        - name: zone
          image: {{ include "quorumlog.image" .root }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          securityContext: {{- include "quorumlog.containerSecurity" . | nindent 12 }}
          env:
            - name: NODE_NAME
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            - {name: LABEL, value: {{ .root.Values.bookie.zone.label | quote }}}
          command:
            - python
            - -c
            - |
              import json, os, pathlib, ssl, urllib.request
              account = pathlib.Path("/account")
              url = "https://kubernetes.default.svc/api/v1/nodes/" + os.environ["NODE_NAME"]
              shown = {"Authorization": "Bearer " + (account / "token").read_text()}
              context = ssl.create_default_context(cafile=account / "ca.crt")
              with urllib.request.urlopen(urllib.request.Request(url, headers=shown), context=context, timeout=30) as told:
                  labels = json.load(told)["metadata"]["labels"]
              pathlib.Path("/zone/zone").write_text(labels[os.environ["LABEL"]])
          resources:
            requests: {cpu: 50m, memory: 64Mi}
            limits: {memory: 128Mi}
          volumeMounts:
            - {name: zone, mountPath: /zone}
            - {name: account, mountPath: /account, readOnly: true}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: {{ include "quorumlog.image" .root }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          {{- if $zoneOfNode }}
          command: [sh, -c, "ZONE=$(cat /zone/zone) exec python -m services.bookie"]
          {{- else }}
          command: [python, -m, services.{{ .role }}]
          {{- end }}
          securityContext: {{- include "quorumlog.containerSecurity" . | nindent 12 }}
          env:
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - {name: HOST, value: 0.0.0.0}
            - {name: METADATA_URLS, value: {{ include "quorumlog.metadataUrls" .root | quote }}}
            {{- include "quorumlog.certificateSettings" . | nindent 12 }}
            {{- .env | nindent 12 }}
            {{- range $setting, $value := $values.settings }}
            - {name: {{ $setting }}, value: {{ $value | quote }}}
            {{- end }}
          ports:
            - {name: internal, containerPort: {{ .port }}}
            {{- if eq .role "gateway" }}
            - {name: public, containerPort: 8080}
            {{- end }}
          startupProbe:
            {{- include $probe (merge (dict "path" "/health/live") .) | nindent 12 }}
            periodSeconds: 5
            failureThreshold: 60
          # The readiness of a gateway is only its liveness: without a metadata service, a gateway is not ready to create ledgers,
          # but clients still need it for reads and for appends to open ledgers.
          readinessProbe:
            {{- include $probe (merge (dict "path" (ternary "/health/live" "/health/ready" (eq .role "gateway"))) .) | nindent 12 }}
            periodSeconds: 10
          livenessProbe:
            {{- include $probe (merge (dict "path" "/health/live") .) | nindent 12 }}
            periodSeconds: 30
            failureThreshold: 4
          resources: {{- toYaml $values.resources | nindent 12 }}
          volumeMounts:
            - {name: certificates, mountPath: /certificates, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            {{- if eq .role "bookie" }}
            - {name: data, mountPath: /data}
            {{- end }}
            {{- if eq .role "metadata" }}
            - {name: database, mountPath: /database, readOnly: true}
            {{- end }}
            {{- if $zoneOfNode }}
            - {name: zone, mountPath: /zone, readOnly: true}
            {{- end }}
            {{- if and (eq .role "gateway") .root.Values.gateway.publicCertificateSecret }}
            - {name: public, mountPath: /public, readOnly: true}
            {{- end }}
      volumes:
        {{- include "quorumlog.certificateVolume" . | nindent 8 }}
        - name: tmp
          emptyDir: {sizeLimit: 64Mi}
        {{- if eq .role "metadata" }}
        - name: database
          secret:
            secretName: {{ .root.Values.databaseSecret }}
            defaultMode: 0440
        {{- end }}
        {{- if $zoneOfNode }}
        - name: zone
          emptyDir: {sizeLimit: 1Mi}
        # The token of the ServiceAccount, which is mounted in the init container only.
        - name: account
          projected:
            sources:
              - serviceAccountToken: {path: token, expirationSeconds: 600}
              - configMap:
                  name: kube-root-ca.crt
                  items: [{key: ca.crt, path: ca.crt}]
        {{- end }}
        {{- if and (eq .role "gateway") .root.Values.gateway.publicCertificateSecret }}
        - name: public
          secret:
            secretName: {{ .root.Values.gateway.publicCertificateSecret }}
            defaultMode: 0440
        {{- end }}
  {{- if eq .role "bookie" }}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $values.storage.className }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests: {storage: {{ $values.storage.size }}}
  {{- end }}
{{- end -}}
