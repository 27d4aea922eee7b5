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
  description = "What machines of this role have in common with no other."
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
  description = "Subnets that they may be in."
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
  description = "Machines."
  type        = number
}

variable "max_machines" {
  description = "Most machines that the group may be scaled to by hand, if more."
  type        = number
  default     = 0
}

variable "spot" {
  description = "Use spot machines."
  type        = bool
}

variable "running" {
  description = "Whether they run."
  type        = bool
}

variable "refresh" {
  description = "Have a new image reach running machines, a tenth of them at a time; else it comes with the next machine."
  type        = bool
  default     = false
}
