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

variable "subnet_ids" {
  description = "Subnets that these learners may be in."
  type        = list(string)
}

variable "instance_type" {
  description = "Instance type: that of the first learner, for each update is as fast as the slowest of them."
  type        = string
}

variable "disk_gb" {
  description = "Size of the root volume in GB."
  type        = number
}

variable "machines" {
  description = "Machines."
  type        = number
}

variable "spot" {
  description = "Use spot machines."
  type        = bool
}

variable "running" {
  description = "Whether they run."
  type        = bool
}
