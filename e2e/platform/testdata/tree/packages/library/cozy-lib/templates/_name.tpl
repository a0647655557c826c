{{- define "cozy-lib.name" }}{{ .Release.Name }}{{ end }}
