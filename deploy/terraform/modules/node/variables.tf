variable "run" {
  description = "The run that the machine takes part in."
  type = object({
    run         = string # name that users see
    name        = string # prefix of AWS names
    region      = string
    parameters  = string # path in the parameter store
    learner     = string # control address
    domain      = string # private DNS zone
    zone_arn    = string
    kms_key_arn = string
    tags        = map(string)
  })
}

variable "machine" {
  description = "Settings specific to machines of this role."
  type = object({
    image_id          = string # made by Packer
    root_device       = string # of the image
    security_group_id = string
    log_group         = string
    secret_arn        = string # parameter with the secret key of the machine's services
    public_address    = bool
  })
}

variable "role" {
  description = "What the machine does."
  type        = string

  validation {
    condition     = contains(["learner", "learner-peer", "replay", "actor", "evaluator"], var.role)
    error_message = "role should be learner, learner-peer, replay, actor or evaluator."
  }
}

variable "index" {
  description = "Number of the replay shard; null for the other roles."
  type        = number
  default     = null
}

variable "host" {
  description = "Name of the machine in the private zone; empty: none."
  type        = string
  default     = ""
}

variable "instance_type" {
  description = "Instance type; an auto-scaling group may mix in others."
  type        = string
}

variable "disk_gb" {
  description = "Size of the root volume in GB."
  type        = number
}

variable "has_policy" {
  description = "Whether `policy` is given (its text may be unknown until apply)."
  type        = bool
  default     = false
}

variable "policy" {
  description = "Additional permissions of this role, as an IAM policy in JSON."
  type        = string
  default     = ""
}
