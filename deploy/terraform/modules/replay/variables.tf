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

variable "subnet_ids" {
  description = "One subnet per zone of availability_zones; shard i is in subnet i modulo their number."
  type        = list(string)
}

variable "availability_zones" {
  description = "Zones of subnet_ids."
  type        = list(string)
}

variable "shards" {
  description = "Number of shards."
  type        = number
}

variable "instance_type" {
  description = "Instance type."
  type        = string
}

variable "disk_gb" {
  description = "Size of the root volume in GB."
  type        = number
}

variable "volume_gb" {
  description = "Size in GB of a volume that outlives the machine; 0: none."
  type        = number
}

variable "running" {
  description = "Whether the shards run."
  type        = bool
}
