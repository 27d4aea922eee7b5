variable "name" {
  description = "Name of the encryption key's alias."
  type        = string
}

variable "region" {
  description = "Region of the run."
  type        = string
}

variable "parameters" {
  description = "Path of the run in the parameter store."
  type        = string

  validation {
    condition     = startswith(var.parameters, "/") && !endswith(var.parameters, "/")
    error_message = "parameters should start with a slash and not end with one."
  }
}

variable "roles" {
  description = "Roles with a key pair."
  type        = set(string)
}

variable "keys_dir" {
  description = "Folder with the run's keys, made by `troupe keys new`."
  type        = string
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
}
