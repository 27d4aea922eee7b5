variable "name" {
  description = "Prefix of names."
  type        = string
}

variable "run" {
  description = "Name of the run, a dimension of its metrics."
  type        = string
}

variable "parameters" {
  description = "Path of the run in the parameter store, and prefix of its log groups."
  type        = string
}

variable "kms_key_arn" {
  description = "Key that encrypts logs and alarms."
  type        = string
}

variable "roles" {
  description = "Roles that have logs."
  type        = set(string)
}

variable "log_retention_days" {
  description = "Days that logs are kept."
  type        = number
}

variable "flow_logs" {
  description = "Log refused connections."
  type        = bool
}

variable "running" {
  description = "Whether machines run; if not, silence raises no alarm."
  type        = bool
}

variable "groups" {
  description = "Auto-scaling groups to watch, by role."
  type        = map(string)
}

variable "alarm_email" {
  description = "Address that receives alarms; empty: none."
  type        = string
}

variable "budget_usd_per_month" {
  description = "Budget of the account in dollars per month; 0: none."
  type        = number
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
}
