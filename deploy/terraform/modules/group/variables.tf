variable "run" {
  description = "The run that the machines take part in; see modules/node."
  type = object({
    run         = string
    name        = string
    region      = string
    parameters  = string
    learner     = string
    domain      = string
    zone_arn    = string
    kms_key_arn = string
    tags        = map(string)
  })
}

variable "machine" {
  description = "Settings specific to machines of this role."
  type = object({
    image_id          = string
    root_device       = string
    security_group_id = string
    log_group         = string
    secret_arn        = string
    public_address    = bool
  })
}

variable "role" {
  description = "What the machines do."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets to use."
  type        = list(string)
}

variable "instance_types" {
  description = "Instance types, all with about the same number of cores."
  type        = list(string)
}

variable "disk_gb" {
  description = "Size of the root volume in GB."
  type        = number
}

variable "machines" {
  description = "Number of machines."
  type        = number
}

variable "max_machines" {
  description = "Upper limit for scaling the group by hand, if larger."
  type        = number
  default     = 0
}

variable "spot" {
  description = "Use spot machines."
  type        = bool
}

variable "running" {
  description = "Whether the machines run."
  type        = bool
}

variable "refresh" {
  description = "Replace running machines when the image changes, a tenth of them at a time; otherwise only new machines use it."
  type        = bool
  default     = false
}
